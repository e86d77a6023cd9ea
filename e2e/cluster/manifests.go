package cluster

// coreDNS is what kubeadm installs, in short.
const coreDNS = `apiVersion: v1
kind: ServiceAccount
metadata: {name: coredns, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: system:coredns}
rules:
- {apiGroups: [""], resources: [endpoints, services, pods, namespaces], verbs: [list, watch]}
- {apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: system:coredns}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: system:coredns}
subjects: [{kind: ServiceAccount, name: coredns, namespace: kube-system}]
---
apiVersion: v1
kind: ConfigMap
metadata: {name: coredns, namespace: kube-system}
data:
  Corefile: |
    .:53 {
        errors
        health {
           lameduck 5s
        }
        ready
        kubernetes cluster.local in-addr.arpa ip6.arpa {
           pods insecure
           fallthrough in-addr.arpa ip6.arpa
           ttl 30
        }
        prometheus :9153
        cache 30
        loop
        reload
        loadbalance
    }
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: coredns, namespace: kube-system, labels: {k8s-app: kube-dns}}
spec:
  replicas: 2
  selector: {matchLabels: {k8s-app: kube-dns}}
  template:
    metadata: {labels: {k8s-app: kube-dns}}
    spec:
      priorityClassName: system-cluster-critical
      serviceAccountName: coredns
      dnsPolicy: Default
      containers:
      - name: coredns
        image: IMAGE
        imagePullPolicy: Never
        args: [-conf, /etc/coredns/Corefile]
        resources: {requests: {cpu: 100m}}
        ports:
        - {containerPort: 53, protocol: UDP, name: dns}
        - {containerPort: 53, protocol: TCP, name: dns-tcp}
        livenessProbe: {httpGet: {path: /health, port: 8080}, initialDelaySeconds: 60, timeoutSeconds: 5}
        readinessProbe: {httpGet: {path: /ready, port: 8181}}
        securityContext: {runAsUser: 0}
        volumeMounts: [{name: config, mountPath: /etc/coredns, readOnly: true}]
      volumes: [{name: config, configMap: {name: coredns}}]
---
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system, labels: {k8s-app: kube-dns}}
spec:
  selector: {k8s-app: kube-dns}
  clusterIP: ADDRESS
  ports:
  - {name: dns, port: 53, protocol: UDP}
  - {name: dns-tcp, port: 53, protocol: TCP}
`

// Pool announces addresses on the LAN by ARP, and other ones to the router by BGP. BFD is not fast: in
// containers it often gets no real-time priority, and a machine that runs a whole cluster is busy.
const Pool = `apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: lan}
spec:
  addresses: [172.30.0.200-172.30.0.229]
---
apiVersion: landfall.dev/v1beta1
kind: L2Advertisement
metadata: {name: lan}
spec:
  ipAddressPools: [lan]
---
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: routed}
spec:
  addresses: [203.0.113.0/27]
  autoAssign: false
---
apiVersion: landfall.dev/v1beta1
kind: BGPAdvertisement
metadata: {name: routed}
spec:
  ipAddressPools: [routed]
---
apiVersion: landfall.dev/v1beta1
kind: BFDProfile
metadata: {name: slow}
spec: {transmitInterval: 300, receiveInterval: 300, detectMultiplier: 3}
---
apiVersion: landfall.dev/v1beta1
kind: BGPPeer
metadata: {name: tor-1}
spec: {myASN: 64500, peerASN: 64501, peerAddress: 172.30.0.1, enableGracefulRestart: true, bfdProfile: slow}
`

// web is three pods that say who they are, and Services of both policies, on the LAN and routed.
const web = `apiVersion: v1
kind: Namespace
metadata: {name: web, labels: {pod-security.kubernetes.io/enforce: restricted}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: web}
spec:
  replicas: REPLICAS
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      securityContext: {runAsNonRoot: true, runAsUser: 65532, seccompProfile: {type: RuntimeDefault}}
      containers:
      - name: web
        image: IMAGE
        imagePullPolicy: Never
        args: [pod, '{"pod":"$(POD)","node":"$(NODE)","addrs":["$(ADDR)"],"tcp":[8080],"udp":[8081]}']
        env:
        - {name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        - {name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
        - {name: ADDR, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        ports:
        - {containerPort: 8080}
        - {containerPort: 8081, protocol: UDP}
        readinessProbe: {tcpSocket: {port: 8080}, periodSeconds: 1}
        resources: {requests: {cpu: 100m}}
        securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
      topologySpreadConstraints:
      - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: DoNotSchedule,
         labelSelector: {matchLabels: {app: web}}}
`

// service is one Service of these pods.
const service = `---
apiVersion: v1
kind: Service
metadata: {name: NAME, namespace: web, annotations: {landfall.dev/loadBalancerIPs: ADDRESS}}
spec:
  type: LoadBalancer
  externalTrafficPolicy: POLICY
  selector: {app: web}
  ports:
  - {name: tcp, port: 80, targetPort: 8080}
  - {name: udp, port: 81, targetPort: 8081, protocol: UDP}
`
